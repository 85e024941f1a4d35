"""A server under many clients: are all answers complete and right, and what does HTTP cost?"""
