"""What every call goes through: arrays of any framework, checks, a device's backend, recorded launches."""
