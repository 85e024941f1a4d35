"""A server under many clients: are all answers there and right, and what does HTTP cost?"""
