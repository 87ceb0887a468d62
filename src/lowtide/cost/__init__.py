"""What a node costs in time: measured where it can run, a roofline where it cannot."""
