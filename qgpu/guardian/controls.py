"""Which RM controls a pod may issue: an allow-list, by what a control's parameters are made of.

A control is carried out by the guardian in its own address space, so one whose parameters hold pointers or
descriptors may only be carried out when it is known where they lie. The rows are RM's own lists, as of 580.105.08: the
exported methods of generated/g_*_nvoc.c whose parameters hold no pointer and which any client may issue, without those
that schedule (but for PREEMPT, which is judged by what it says), set up a card or tell of other processes;
embedded_param_copy.c; rmapi_deprecated_control.c. What is in no row is answered NV_ERR_NOT_SUPPORTED, as from a driver
that does not have it; what is refused by name is in ``rules.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

from qgpu.rm import abi

# By class (the upper half of a control's number), the lower halves.
_FLAT: dict[int, str] = {
    0x0000: (
        "0102 0104 0108 0110 0111 0121 0124 012A 012B 012C 012D 012E 012F 0133 0134 0135 0136 0137 "
        "0139 013A 013B 013E 0142 0143 0144 0146 0147 01F0 0201 0203 0204 0205 0214 0215 0216 0219 "
        "021B 0240 0274 0275 0279 027B 0282 0287 0288 0289 0290 0301 0302 0488 0489 0501 0502 0601 0603 0A01 "
        "0A04 0B02 0D01 0D02 0D04 0D05 0D06 0D07"
    ),
    0x0002: "0102 0103",
    0x0041: "0112 0116 0118 0120 0121",
    0x0080: (
        "0280 0288 0289 028C 028E 0290 0291 0292 0293 0294 0298 1107 1108 1109 1110 1306 1307 1402 1707 170E "
        "1713 1801 1805 1806 1809 180A 180C 180D 180E 1909 1B02 1C02 1F02 200A"
    ),
    0x0090: "0101 0103 0105 0107 010B",
    0x00DA: "0001 0002 0003 0004 0005 0006",
    0x00DE: "0001",
    0x00E0: "0102 0103",
    0x00F1: "0001 0002",
    0x00F8: "0101 0102 0103 0104 0105",
    0x00F9: "0101",
    0x00FB: "0101",
    0x00FD: "0101 0102 0105 0106 0107",
    0x2080: (
        "0102 0110 0111 0118 0119 0125 0128 012F 0131 0133 0137 0138 0139 013F 0142 0145 0146 0147 014A 014B "
        "014D 0153 0154 0156 0157 015A 015B 015F 0160 0168 0169 016B 016C 016D 0170 0173 0175 017A 017B 017C "
        "017E 0181 0182 0185 0188 018B 018D 018E 0192 0195 0196 019B 019F 01A0 01A2 01A3 01A4 01A6 01AB 01AE "
        "01AF 01B0 01B1 01B2 01E5 01E6 0301 0302 0303 0304 0306 0308 0309 0401 0402 0403 0404 0406 0513 0601 "
        "0603 0808 0809 080B 080E 0810 0A69 0ADA 1103 1108 1109 110D 1122 1123 1124 1205 1206 1207 1208 "
        "1209 120A 120E 120F 1210 1212 1213 1215 1218 121B 121C 121D 121E 1227 1228 122A 122B 122C 122D "
        "1230 1231 1233 1234 1235 1236 1237 1238 1239 123A 123C 123D 1303 130C 1313 1315 1320 1322 1328 "
        "1342 1344 1346 1347 1348 1352 1354 1355 1357 1358 1360 1701 1702 1703 170D 170E 170F 1801 1803 1812 "
        "1813 1815 1816 1817 1819 1821 1822 1823 1825 1827 1828 1829 182A 182B 182D 1830 1831 200A 200B "
        "205A 205D 2068 2069 206E 2087 2096 2205 2209 220C 2210 2213 2401 2502 2503 2609 2A02 2A03 2A0A 3001 "
        "3002 3003 3004 3009 300E 3015 3018 303F 3042 3050 3074 3083 3085 3087 3088 308F 3091 309B 3101 3118 "
        "3120 3122 3125 3400 3401 3404 3406 3501 3504 3601 3602 3604 3801 3D02 3D07 4101"
    ),
    0x208F: "1105",
    0x503C: "0102 0103 0104 0105 0106",
    0x506F: "0105",
    0x83DE: (
        "0301 0302 0307 0308 0309 030B 030C 030F 0310 0313 0314 031C 031D 031F 0320 0321 0322 0323 0324 0325 "
        "0328 032A 032B"
    ),
    0x906F: "0101 0102 0105 0106",
    0x9074: "0101 0102 0103",
    0x9096: "0101 0102 0103 0104 0105 0106 0107",
    0x90CC: "0101 0102 0103 0301 0302",
    0x90CD: "0101 0102 0104 0105",
    0x90E6: "0101 0102",
    0x90E7: "0113 0119",
    0xA06C: "0101 0102 0104 0105 0106 0109",
    0xA06F: "0103 0104 0108 0112 0113",
    0xB06F: "010B 010E 010F 0111",
    0xB0CC: (
        "0101 0102 0103 0104 0105 0106 0107 0108 0109 010A 010B 010C 010D 010E 010F 0113 0114 0115 0116 0117 "
        "0118 0119 011A 0201 0202 0203 0301 0302"
    ),
    0xC36F: "0108 010A",
    0xC56F: "010B 010C 010E",
    0xCB33: "0101 0104 0106 0109 010A 010B 010C",
}

#: Controls whose parameters are plain data.
FLAT = frozenset(upper << 16 | int(lower, 16) for upper, lowers in _FLAT.items() for lower in lowers.split())

#: Sent on to the card's firmware unread (rmapi_gss_legacy_control.c, binary_api.c): only those that NVIDIA's own
#: libraries were seen to use, and only on a client of the pod's own, which RM does not check.
LEGACY = frozenset(
    {
        *(0x20808159, 0x20808162, 0x2080852E, 0x2080852F, 0x20809001, 0x20809009, 0x20809038, 0x20809064),
        *(0x2080A026, 0x2080A084, 0x2080A612, 0x2080A618, 0x20810108, 0x20810110),
        # nvidia-smi -q: temperatures and fans, clocks and performance states, power, and of the card itself
        *(0x2080852A, 0x2080852B, 0x2080852C, 0x20808536, 0x2080853A, 0x20808542, 0x20808546, 0x2080A060, 0x2080A06E),
        *(0x2080A06F, 0x2080A080, 0x2080A0A4, 0x2080A0A7, 0x2080A0A8, 0x2080A0F2, 0x2080A63C, 0x20809019, 0x20810111),
    }
)


@dataclass(frozen=True, slots=True)
class Nested:
    """A pointer within parameters: where it lies, and how long what it points to is.

    That is ``unit`` bytes times the count at ``count_at`` (bytes 0 to 3 of the parameters where not said
    otherwise), or ``unit`` alone where there is no count.
    """

    pointer_at: int
    unit: int
    count_at: int | None = 0


#: Controls with pointers, by where they are.
NESTED: dict[int, tuple[Nested, ...]] = {
    0x101: (Nested(8, 1), Nested(16, 1), Nested(24, 1)),  # SYSTEM_GET_BUILD_VERSION
    0x202: (Nested(16, 0, None),),  # GPU_GET_ID_INFO: szName, which RM does not use
    0x800201: (Nested(8, 4),),  # GPU_GET_CLASSLIST
    abi.NV0041_GET_SURFACE_INFO: (Nested(8, 8),),  # asked of memory that came by a descriptor
    0x801102: (Nested(8, 1),),  # GR_GET_CAPS
    0x801104: (Nested(8, 8),),  # GR_GET_INFO
    0x801301: (Nested(8, 1),),  # FB_GET_CAPS
    0x801401: (Nested(8, 1),),  # HOST_GET_CAPS
    0x801701: (Nested(8, 1),),  # FIFO_GET_CAPS
    0x80170D: (Nested(8, 4), Nested(16, 4)),  # FIFO_GET_CHANNELLIST
    0x801B01: (Nested(8, 1),),  # MSENC_GET_CAPS
    0x801C01: (Nested(8, 1),),  # BSP_GET_CAPS
    0x20800101: (Nested(8, 8),),  # GPU_GET_INFO
    0x20800123: (Nested(8, 4),),  # GPU_GET_ENGINES
    0x20800124: (Nested(8, 4, 4),),  # GPU_GET_ENGINE_CLASSLIST
    0x20800802: (Nested(8, 8),),  # BIOS_GET_INFO
    0x20801201: (Nested(8, 8),),  # GR_GET_INFO
    abi.NV2080_FB_GET_INFO: (Nested(8, 8),),
    0x20801802: (Nested(8, 8),),  # BUS_GET_INFO
    0x20802A01: (Nested(8, 1, 4),),  # CE_GET_CAPS
}

#: Controls with a descriptor of the caller's, by where it is (4 bytes).
DESCRIPTORS = {
    abi.NV0000_OS_UNIX_EXPORT_OBJECT_TO_FD: 16,
    abi.NV0000_OS_UNIX_IMPORT_OBJECT_FROM_FD: 0,
    0x3D08: 0,  # OS_UNIX_GET_EXPORT_OBJECT_INFO
    abi.NV0000_OS_UNIX_EXPORT_OBJECTS_TO_FD: 0,
    abi.NV0000_OS_UNIX_IMPORT_OBJECTS_FROM_FD: 0,
    0x00FD0104: 8,  # MULTICAST ATTACH_GPU
}

#: Controls that give memory another reference, in the kernel or in a client.
GIVE_HANDLES = frozenset(
    {
        *(abi.NV0000_OS_UNIX_EXPORT_OBJECT_TO_FD, abi.NV0000_OS_UNIX_EXPORT_OBJECTS_TO_FD),
        *(abi.NV0000_OS_UNIX_IMPORT_OBJECT_FROM_FD, abi.NV0000_OS_UNIX_IMPORT_OBJECTS_FROM_FD),
        abi.NV00FD_ATTACH_MEM,
    }
)

#: Controls that take back what another has registered, and say that it is not there when they have.
TAKE_BACK = frozenset({0x503C0103, 0x503C0105})  # UNREGISTER_VA_SPACE, UNREGISTER_VIDMEM

#: Controls from which something is learned, or whose answer is fitted.
LOOKED_AT = frozenset(
    {
        *(abi.NV2080_FB_GET_INFO_V2, abi.NV2080_GPU_GET_PIDS, abi.NV2080_GPU_GET_PID_INFO, abi.NV00FD_ATTACH_MEM),
        *(abi.NVA06C_GPFIFO_SCHEDULE, abi.NVA06F_GPFIFO_SCHEDULE, abi.NV2080_GR_SET_CTXSW_PREEMPTION_MODE),
        *(abi.NV2080_PERF_GET_UTIL_SAMPLES, abi.NVA06C_PREEMPT),
        *(abi.NV0000_GPU_GET_PROBED_IDS, abi.NV0000_GPU_GET_ATTACHED_IDS),
    }
)

ALLOWED = FLAT | LEGACY | NESTED.keys() | DESCRIPTORS.keys()
