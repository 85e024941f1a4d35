"""Recurrent layers: convolutions and states along chains and trees."""
