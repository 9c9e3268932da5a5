"""A cluster in one process, under a virtual clock: training is real, only time is not."""
