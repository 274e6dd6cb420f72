"""What a rank has told, kept and pushed: the successor of an owner that dies gets it again."""
