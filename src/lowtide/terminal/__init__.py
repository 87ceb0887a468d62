"""What the commands print, write and call: progress, tables, JSON records, and the door to the library."""
