"""Episodes that `marlaas run` keeps: format (`record`), files (`files`), selection (`selection`), display (`show`)."""
