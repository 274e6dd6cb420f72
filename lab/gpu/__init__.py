"""What only a GPU can show, and what walks the same code without one."""
