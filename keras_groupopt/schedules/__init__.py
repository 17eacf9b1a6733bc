"""Learning-rate schedules that Keras lacks."""
