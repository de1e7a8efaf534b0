"""The devices that a rank's graphs run on."""
