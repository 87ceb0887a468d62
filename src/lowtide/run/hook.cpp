// The allocation hook: a c10::Allocator that answers an operator's requests from planned addresses.
//
// Problem.  Most ATen operators have no real out= variant, so their results and their internal
// temporaries come from the allocator, wherever that likes.  A plan wants them at planned offsets.
//
// Method.  One Hook is installed in front of the CPU allocator, for the life of the process.  Per
// thread it is in one of three modes:
//   idle    everything goes to the base allocator, which also does the profiler's bookkeeping;
//   record  the same, and each request and release is logged (lt_record_*);
//   serve   a Table is entered; requests of the current step are answered in the recorded order.
// The current step is one word per table that the executor writes before each operator.
//
// Why a wrong answer is impossible.  A request is served only while the step's requests equal the
// recorded ones, the same sizes in the same order, and only at an address that no block served before
// in this step still holds.  At the first difference the rest of the step goes to the base allocator.
// The executor compares addresses afterwards and copies what landed elsewhere.
//
// Lifetime.  An arena is a block that counts the data pointers into it (the tensor that was made of
// the whole block is one of them); the last release returns it, whoever held it.  Output slots are
// memory of live tensors: releasing a pointer into them does nothing.
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <atomic>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <mutex>
#include <vector>

namespace {

struct Arena {
  char* low;
  char* high;
  std::atomic<int64_t> references{1};
};

struct Request {
  int64_t offset;  // bytes from the base of `slot`
  int64_t nbytes;
  int64_t slot;       // 0 the arena, then the output slots
  int64_t temporary;  // 1: has to be released before the step ends
};

struct Held {
  char* low;
  char* high;
  bool temporary;
};

struct Slot {
  char* low = nullptr;
  char* high = nullptr;
};

struct Table {
  int64_t step = 0;  // written by the executor; 0: serve nothing
  int64_t served = 0, missed = 0, missed_bytes = 0, kept_step = 0;
  std::vector<int64_t> first;
  std::vector<Request> requests;
  std::vector<Slot> slots;
  std::vector<int64_t> misses;  // per step, since the table was made
  Arena* arena = nullptr;
};

struct Event {
  void* address;
  int64_t nbytes;  // -1: released
};

struct Thread {
  Table* table = nullptr;
  int64_t step = 0;
  int64_t next = 0, end = 0;
  std::vector<Held> held;  // served in this step and not released
  std::vector<Event>* log = nullptr;
  bool make_arena = false;
};

thread_local Thread here;
std::mutex arenas_mutex;
std::vector<Arena*> arenas;
std::atomic<int64_t> recorders{0}, foreign{0};
c10::Allocator* base = nullptr;

Arena* find_arena(const void* p) {
  for (Arena* arena : arenas)
    if (p >= arena->low && p < arena->high) return arena;
  return nullptr;
}

void drop_reference(Arena* arena) {
  if (arena->references.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  {
    std::lock_guard<std::mutex> lock(arenas_mutex);
    for (size_t i = 0; i < arenas.size(); ++i)
      if (arenas[i] == arena) arenas.erase(arenas.begin() + i);
  }
  base->raw_deallocate(arena->low);
  delete arena;
}

// Enter the step that the executor announced, closing the previous one.
void follow_step() {
  Table& table = *here.table;
  if (here.step == table.step) return;
  for (const Held& block : here.held)
    if (block.temporary) table.kept_step = here.step;
  here.held.clear();
  here.step = table.step;
  here.next = table.first[here.step];
  here.end = table.first[here.step + 1];
}

// Note that a served block came back; at one address the latest is meant.
void note_release(const void* p) {
  for (auto block = here.held.rbegin(); block != here.held.rend(); ++block)
    if (block->low == p) {
      here.held.erase(std::next(block).base());
      return;
    }
}

bool is_held(const char* low, const char* high) {
  for (const Held& block : here.held)
    if (low < block.high && block.low < high) return true;
  return false;
}

bool in_output_slot(const void* p) {
  if (!here.table) return false;
  for (size_t i = 1; i < here.table->slots.size(); ++i)
    if (p >= here.table->slots[i].low && p < here.table->slots[i].high) return true;
  return false;
}

// Release of a block that may be an arena's; false: it is not.
bool release_arena_block(void* p) {
  Arena* arena = here.table ? here.table->arena : nullptr;
  if (!arena || p < arena->low || p >= arena->high) {
    std::lock_guard<std::mutex> lock(arenas_mutex);
    arena = find_arena(p);
  }
  if (!arena) return false;
  drop_reference(arena);
  return true;
}

void release_served(void* p) {
  if (here.table) note_release(p);
  release_arena_block(p);
}

void release_output(void* p) {
  if (here.table) note_release(p);
}

// The planned address of this request and the deleter that goes with it; null: it is not as planned.
void* serve(size_t n, c10::DeleterFnPtr* deleter) {
  Table& table = *here.table;
  follow_step();
  if (here.next < here.end) {
    const Request& wanted = table.requests[here.next];
    char* low = table.slots[wanted.slot].low + wanted.offset;
    if (wanted.nbytes == static_cast<int64_t>(n) && !is_held(low, low + n)) {
      ++here.next;
      ++table.served;
      here.held.push_back({low, low + n, wanted.temporary != 0});
      *deleter = wanted.slot == 0 ? &release_served : &release_output;
      if (wanted.slot == 0) table.arena->references.fetch_add(1, std::memory_order_relaxed);
      return low;
    }
    here.next = here.end;
  }
  ++table.missed;
  ++table.misses[here.step];
  table.missed_bytes += n;
  return nullptr;
}

// The raw deleter: it is handed everything that raw_allocate ever returned.
void release_any(void* p) {
  if (!p) return;
  if (here.table) note_release(p);
  if (in_output_slot(p) || release_arena_block(p)) return;
  if (here.log) here.log->push_back({p, -1});
  base->raw_deallocate(p);
}

void* make_arena(size_t n) {
  here.make_arena = false;
  char* p = static_cast<char*>(base->raw_allocate(n));
  Arena* arena = new Arena{p, p + n};
  std::lock_guard<std::mutex> lock(arenas_mutex);
  arenas.push_back(arena);
  return p;
}

struct Hook final : c10::Allocator {
  c10::DataPtr allocate(size_t n) override {
    const c10::Device cpu(c10::DeviceType::CPU);
    if (n == 0) return base->allocate(n);
    if (here.table) {
      c10::DeleterFnPtr deleter = nullptr;
      if (void* p = serve(n, &deleter)) return {p, p, deleter, cpu};
    } else if (here.make_arena) {
      void* p = make_arena(n);
      return {p, p, &release_served, cpu};
    } else if (here.log) {
      void* p = base->raw_allocate(n);
      here.log->push_back({p, static_cast<int64_t>(n)});
      return {p, p, &release_any, cpu};
    } else if (recorders.load(std::memory_order_relaxed)) {
      foreign.fetch_add(static_cast<int64_t>(n), std::memory_order_relaxed);
    }
    return base->allocate(n);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release_any; }
  bool is_simple_data_ptr(const c10::DataPtr& p) const override { return base->is_simple_data_ptr(p); }
  void copy_data(void* to, const void* from, std::size_t n) const override { std::memcpy(to, from, n); }
};

Hook hook;

}  // namespace

extern "C" {

// Put the hook in front of the CPU allocator.  Once per process; 0: another allocator refused to yield.
int lt_install() {
  if (base) return c10::GetAllocator(c10::DeviceType::CPU) == &hook;
  c10::Allocator* current = c10::GetAllocator(c10::DeviceType::CPU);
  if (!current->raw_deleter()) return 0;
  base = current;
  c10::SetAllocator(c10::DeviceType::CPU, &hook, 255);
  return c10::GetAllocator(c10::DeviceType::CPU) == &hook;
}

void lt_uninstall() { c10::SetAllocator(c10::DeviceType::CPU, base, 255); }

// The next request of this thread becomes an arena.
void lt_next_is_arena(int yes) { here.make_arena = yes != 0; }

int64_t lt_arena_count() {
  std::lock_guard<std::mutex> lock(arenas_mutex);
  return static_cast<int64_t>(arenas.size());
}

// Logging of this thread's requests; `lt_record_stop` returns how many events there were, and the
// bytes that other threads asked for meanwhile.
void lt_record_start() {
  delete here.log;
  here.log = new std::vector<Event>();
  foreign.store(0);
  recorders.fetch_add(1);
}

int64_t lt_record_stop(int64_t* foreign_bytes) {
  recorders.fetch_sub(1);
  *foreign_bytes = foreign.load();
  return static_cast<int64_t>(here.log->size());
}

// Copies the log out and ends the recording; `events` holds (address, nbytes or -1) pairs.
void lt_record_take(int64_t* events) {
  for (const Event& event : *here.log) {
    *events++ = reinterpret_cast<int64_t>(event.address);
    *events++ = event.nbytes;
  }
  delete here.log;
  here.log = nullptr;
}

// `requests` has four entries each: offset, nbytes, slot, temporary; step s owns those from first[s] to
// first[s + 1]; step 0 owns none.
Table* lt_table_new(int64_t steps, const int64_t* first, const int64_t* requests, int64_t slots) {
  Table* table = new Table();
  table->first.assign(first, first + steps + 1);
  for (int64_t i = 0; i < first[steps]; ++i, requests += 4)
    table->requests.push_back({requests[0], requests[1], requests[2], requests[3]});
  table->slots.resize(slots);
  table->misses.assign(steps, 0);
  return table;
}

void lt_table_free(Table* table) { delete table; }

// Addresses of the words of a table: step, served, missed, missed_bytes, kept_step.
int64_t* lt_table_words(Table* table) { return &table->step; }

int64_t* lt_table_misses(Table* table) { return table->misses.data(); }

// Serve this thread from `table`; `slots` has (address, nbytes) pairs.  Returns what was entered before.
Table* lt_enter(Table* table, const int64_t* slots) {
  Table* before = here.table;
  table->step = 0;
  for (Slot& slot : table->slots) {
    slot.low = reinterpret_cast<char*>(slots[0]);
    slot.high = slot.low + slots[1];
    slots += 2;
  }
  {
    std::lock_guard<std::mutex> lock(arenas_mutex);
    table->arena = find_arena(table->slots[0].low);
  }
  here.table = table;
  here.step = 0;
  here.next = here.end = 0;
  here.held.clear();
  return before;
}

void lt_leave(Table* before) {
  here.table->step = 0;
  follow_step();
  here.table = before;
  here.step = 0;
  here.next = here.end = 0;
  here.held.clear();
}

// A hash of up to 16 words of each block, spread evenly over it; `blocks` has (address, nbytes) pairs.  Blocks
// whose contents changed as a whole give another one.
uint64_t lt_glance(int64_t count, const int64_t* blocks) {
  uint64_t hash = 1469598103934665603ull;
  for (int64_t b = 0; b < count; ++b, blocks += 2) {
    const char* start = reinterpret_cast<const char*>(blocks[0]);
    const int64_t last = blocks[1] - 8;
    for (int64_t k = 0; k < 16; ++k) {
      uint64_t word = 0;
      if (last >= 0)
        std::memcpy(&word, start + (last * k / 15) / 4 * 4, 8);
      else if (k < blocks[1])
        word = static_cast<unsigned char>(start[k]);
      hash = (hash ^ word) * 1099511628211ull;
      hash ^= hash >> 29;
    }
  }
  return hash;
}

}  // extern "C"
