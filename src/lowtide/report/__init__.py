"""What a plan does with memory, for people: one HTML page, one text, one picture."""
