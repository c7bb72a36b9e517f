#ifndef KVFERRY_DRIVER_HPP
#define KVFERRY_DRIVER_HPP

// Print what went wrong and remember that something did.
void expect(bool good, const char *what);

void process_memory_cases();

void uring_cases();

#endif
