"""Records and traces in; tables, figures and pages out. Never imports torch."""
