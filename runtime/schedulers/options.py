"""Options that several schedulers share: defaults as in diffusers 0.42.1, and supported values."""

from __future__ import annotations

from typing import Any

BETA = {
    "num_train_timesteps": 1000,
    "beta_start": 0.0001,
    "beta_end": 0.02,
    "beta_schedule": "linear",
    "trained_betas": None,
    "prediction_type": "epsilon",
    "steps_offset": 0,
}
ZERO_SNR = {"rescale_betas_zero_snr": False}
THRESHOLD = {
    "thresholding": False,
    "dynamic_thresholding_ratio": 0.995,
    "sample_max_value": 1.0,
}
CLIP = {"clip_sample": False, "clip_sample_range": 1.0}
SIGMAS = {
    "use_karras_sigmas": False,
    "use_exponential_sigmas": False,
    "use_beta_sigmas": False,
    "sigma_min": None,
    "sigma_max": None,
}
FLOW = {
    **SIGMAS,
    "num_train_timesteps": 1000,
    "shift": 1.0,
    "use_dynamic_shifting": False,
    "base_shift": 0.5,
    "max_shift": 1.15,
    "base_image_seq_len": 256,
    "max_image_seq_len": 4096,
    "invert_sigmas": False,
    "shift_terminal": None,
    "time_shift_type": "exponential",
}
RISING = {key: value for key, value in FLOW.items() if key != "invert_sigmas"}
COGVIDEOX = {
    **BETA,
    **ZERO_SNR,
    **CLIP,
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "clip_sample": True,
    "sample_max_value": 1.0,
    "set_alpha_to_one": True,
    "timestep_spacing": "leading",
    "snr_shift_scale": 3.0,
}
EDM = {
    "num_train_timesteps": 1000,
    "sigma_min": 0.002,
    "sigma_max": 80.0,
    "sigma_data": 0.5,
    "sigma_schedule": "karras",
    "rho": 7.0,
    "prediction_type": "epsilon",
    "final_sigmas_type": "zero",
}
EDM_CHOICES = {
    "sigma_schedule": ("karras", "exponential"),
    "prediction_type": ("epsilon", "v_prediction"),
    "final_sigmas_type": ("zero", "sigma_min"),
}
FLOW_SIGMAS = {
    "use_flow_sigmas": False,
    "flow_shift": 1.0,
    "use_dynamic_shifting": False,
    "time_shift_type": "exponential",
    "final_sigmas_type": "zero",
    "lower_order_final": True,
    "solver_order": 2,
}
DISTILLED = {
    **BETA,
    **ZERO_SNR,
    **THRESHOLD,
    **CLIP,
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "original_inference_steps": 50,
    "set_alpha_to_one": True,
    "timestep_spacing": "leading",
    "timestep_scaling": 10.0,
}
BETAS = ("linear", "scaled_linear", "squaredcos_cap_v2")
FIXED = ("fixed_small", "fixed_small_log", "fixed_large")
CHOICES: dict[str, tuple[Any, ...]] = {
    "beta_schedule": BETAS,
    "prediction_type": ("epsilon", "sample", "v_prediction"),
    "timestep_spacing": ("linspace", "leading", "trailing"),
    "final_sigmas_type": ("zero", "sigma_min"),
    "time_shift_type": ("exponential", "linear"),
    "solver_order": (1, 2, 3),
}
WITH_FLOW = {
    **CHOICES,
    "prediction_type": ("epsilon", "sample", "v_prediction", "flow_prediction"),
}
