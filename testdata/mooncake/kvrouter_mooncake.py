"""Lets vLLM's MooncakeConnector start on a machine without an accelerator.

It asks torch for the index of the accelerator that it runs on, which torch
refuses where there is none. For the CPU's memory any index does. A plugin of the
group vllm.general_plugins is loaded in every process of vLLM before the
connector is made.
"""

import torch


def install():
    if not torch.accelerator.is_available():
        torch.accelerator.current_device_index = lambda: 0
