"""The elastic engine: islands join, die and rejoin while the run goes on, and a quorum of them commits every round."""
