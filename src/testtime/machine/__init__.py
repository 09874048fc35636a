"""Hardware and operating system: devices, threads, memory, interrupts, captured graphs."""
