"""paceline"""
