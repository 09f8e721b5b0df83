"""To try, measure and predict; nothing that trains needs it."""
