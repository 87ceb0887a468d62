// Eager's own square root on a block in place, through libtorch's C shim: MKL's differs from IEEE's.
extern "C" int32_t aoti_torch_create_tensor_from_blob(void*, int64_t, const int64_t*, const int64_t*, int64_t,
    int32_t, int32_t, int32_t, void**);
extern "C" int32_t aoti_torch_delete_tensor_object(void*);
extern "C" int32_t aoti_torch_device_type_cpu();
extern "C" int32_t aoti_torch_dtype_float32();
extern "C" int32_t aoti_torch_dtype_float64();
namespace at { class Tensor; namespace _ops { struct sqrt_ { static Tensor& call(Tensor&); }; } }
LT int32_t lt_dtype(float*) { return aoti_torch_dtype_float32(); }
LT int32_t lt_dtype(double*) { return aoti_torch_dtype_float64(); }
template <class T> static void lt_torch_sqrt(T* x, int64_t n) {
  void* handle = nullptr; int64_t step = 1;
  if (aoti_torch_create_tensor_from_blob(x, 1, &n, &step, 0, lt_dtype(x), aoti_torch_device_type_cpu(), 0, &handle) == 0) {
    at::_ops::sqrt_::call(*(at::Tensor*)handle);
    aoti_torch_delete_tensor_object(handle);
  }
}
