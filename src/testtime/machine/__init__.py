"""The machine: devices, threads, memory, interrupts, captured graphs."""
