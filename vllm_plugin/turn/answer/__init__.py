"""The way from the engine's answer to the client's: dialects, delivery, receipt, and answers given again."""
