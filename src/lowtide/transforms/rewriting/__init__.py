"""Rewriting by mathematical properties (DNNFusion, section 4.2), before fusion: `rewrite.rewrite`."""
