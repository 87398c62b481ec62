"""Generated gRPC stubs (`make proto`); never edited by hand, drift checked by `make proto-check`."""
