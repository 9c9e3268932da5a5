"""atoll trains language models on islands of devices that are poorly connected, unequal and unreliable."""
