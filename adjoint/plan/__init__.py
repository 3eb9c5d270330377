"""Planning before a run: which layouts fit in memory, how long they take, how layers are cut."""
