"""The host side of serving: scheduler, compiled steps, engine, detokenising and metrics."""
