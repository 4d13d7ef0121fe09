"""Search that tries remedies one by one, keeps those that are proved, and checks what they change in the numbers."""
