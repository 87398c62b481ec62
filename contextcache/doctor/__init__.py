"""`context-cache doctor`: checks a running deployment from outside and says in words what is wrong."""
