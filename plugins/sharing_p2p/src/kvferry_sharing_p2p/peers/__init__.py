"""What the schedulers of two instances say to each other: hello, ask, renew, done."""
