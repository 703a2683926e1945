# SPDX-License-Identifier: Apache-2.0
raise ImportError("this is a placeholder; install the package from its own repository")
