"""python -m train.plan: who does what on a mesh, before any process is started."""
