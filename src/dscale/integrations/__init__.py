"""The method on other engines. Nothing of DScale imports this package but the command that starts them."""
