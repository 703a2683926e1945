# SPDX-License-Identifier: Apache-2.0
"""Signatures of the real packages, as their documentation and sources give them; the fakes must have the same."""

NRTPY = {
    "NrtpyTensor": "(tensor_ref, shape, dtype, name=None)",
    "NrtpyTensor.from_numpy": "(array, name=None, core_id=0)",
    "NrtpyTensor.write_from_numpy": "(self, array)",
    "NrtpyTensor.numpy": "(self)",
    "NrtpyModel.load_from_neff": "(neff_path, name=None, core_id=0, cc_enabled=False, rank_id=0, world_size=1)",
    "NrtpyModel.__call__": "(self, inputs, outputs=None, save_trace=False, ntff_name=None)",
}
SPMD = {
    "SPMDModel": "(neff, metaneff, local_ranks_size, world_size, /)",
    "SPMDModel.initialize": "(self, states, weights, start_rank, /)",
    "SPMDModel.forward": "(self, inputs, /)",
}
ARTIFACTS = {
    "ModelParamInfo": "(param_name, is_positional)",
    "ProvidedArgInfo": "(param_name, is_positional, tensor)",
    "TraceArtifacts": "(hlo, metaneff, flattener, packer, weight_name_to_idx, weight_names_to_skip, provided_args, "
    "model_params)",
    "CompilationArtifacts": "(neff_filepath)",
}
NXD_MODEL = {
    "NxDModel": "(world_size, start_rank=None, local_ranks_size=None, state_initializer=None, layout_transformer=None)",
    "NxDModel.add": "(self, key, trace_artifacts, compilation_artifacts)",
    "NxDModel.set_weights": "(self, sharded_checkpoint)",
    "NxDModel.to_neuron": "(self)",
    "NxDModel.read_from_neuron_buffer": "(self, buffer_key, rank)",
    "NxDModel.write_to_neuron_buffer": "(self, tensor, buffer_key, rank)",
    "NxDModel.forward": "(self, *args, model_name=None, forward_mode='default', **kwargs)",
}
STATE_INITIALIZER = {"StateInitializer": "(shapes, dtypes, local_ranks_size)"}
