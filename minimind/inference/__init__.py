"""Load a trained model, generate text, and score texts.

Start in `load_model.py`.
"""
