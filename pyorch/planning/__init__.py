"""The division of memory among forms of experts: routing by rank, the cost of a division, and the best one."""
