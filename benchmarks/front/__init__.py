"""What `bench_front.py` is made of: a stub engine, a load generator, the processes of each path, plan and report."""
