"""What numbers of rows travel as between servers, in the order of pyorch_rows, and the bytes of one."""

ROW_BYTES = {"f32": 4, "bf16": 2}
ROW_TYPES = tuple(ROW_BYTES)
