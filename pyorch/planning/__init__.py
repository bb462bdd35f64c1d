"""How memory is divided between forms of experts: routing by rank, what a division costs, and which one is best."""
