"""From the engine's answer to the client's: each dialect, the delivery, the receipt, and answers given again."""
