"""What Dynamo and Inductor ask of a type of device of which there is one, and which torch has not registered itself."""

from __future__ import annotations

from torch._dynamo.device_interface import DeviceInterface


class OneDevice(DeviceInterface):
    @staticmethod
    def current_device() -> int:
        return 0

    @staticmethod
    def device_count() -> int:
        return 1

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def is_bf16_supported(including_emulation: bool = False) -> bool:
        return True

    class Worker(DeviceInterface.Worker):
        @staticmethod
        def current_device() -> int:
            return 0
