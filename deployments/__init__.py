"""The two Serve deployments, Renderer and Scheduler, and `app`, which wires them."""
