def why_not(*a, **k): return ()
