"""Common forms that readers return: plain columns, the same for every format."""
