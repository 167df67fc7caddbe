"""The collectives that gather and reduce-scatter one leaf."""
