"""Search that tries remedies one by one, keeps those that are proved faster or smaller, and checks their numerics."""
