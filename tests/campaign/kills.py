def cases(*a): return iter(())
