"""One leg to one worker, and the client that is answered."""
