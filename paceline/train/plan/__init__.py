"""`paceline train plan`: what a head would be worth, predicted from pilots of minutes."""
