"""What one client's rejected and crashing requests cost the others, on a running deployment."""
