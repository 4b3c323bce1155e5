"""Choose the worker that gets a request: policies, pure but for the ZMQ subscriber that feeds one of them."""
