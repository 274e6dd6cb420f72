"""What torch optimizer classes keep at an owner, and what ranks compute for them."""
