"""Parameter servers: tasks that hold variables, which workers read and change."""
